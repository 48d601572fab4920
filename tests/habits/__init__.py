"""What scripts do with a model and an optimizer, as cases: each file holds those of one section of docs/torch.md."""
