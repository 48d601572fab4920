"""What a job has learnt, where it is used: models that are saved for serving, and models that are kept fresh."""
