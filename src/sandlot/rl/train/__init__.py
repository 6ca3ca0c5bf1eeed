"""The training half: packed batches in, better weights out. It never imports the rollout half."""
