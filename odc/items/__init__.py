"""Items: data other than parameters that ranks read from each other, such as outputs of encoders and their
gradients."""
