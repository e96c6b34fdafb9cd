"""`reproduce two-stage`: the paper's recipe of two stages in small, plain beside bubbles, measured by GSM8K."""
