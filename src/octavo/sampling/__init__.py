"""One sampling feature, one class, one file, in one fixed pipeline."""
