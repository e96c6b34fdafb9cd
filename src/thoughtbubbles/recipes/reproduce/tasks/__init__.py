"""`reproduce tasks`: models on made-up tasks whose hard places are known, at equal training FLOPs."""
