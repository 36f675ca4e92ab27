"""A whole step of training as captured graphs under one plan."""
