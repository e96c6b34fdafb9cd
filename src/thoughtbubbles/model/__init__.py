"""The paper, and only the paper.

To read it from top to bottom: transformer, fork, selection, attention, block, head, loss. Beside them: config (what a
model is), budget (exact rounding), streams (the state between layers), rope, inputs (validation), cost (what it takes).
"""
