"""The model of the paper, and nothing else.

Read in this order: transformer, fork, selection, attention, block, head, loss. They build on config (what defines a
model), budget (exact rounding), streams (the state between layers), layout, rope, inputs (validation) and cost.
"""
