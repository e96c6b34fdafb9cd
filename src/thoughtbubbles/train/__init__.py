"""Training: one loop for pretraining, mid-training and fine-tuning, on one device or many."""
