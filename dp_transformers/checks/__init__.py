"""What is looked at before and while a model is trained."""
