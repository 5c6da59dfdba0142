"""What ranks read from each other that is no parameter: outputs of encoders, their gradients."""
