"""What `kt.Compute` is made of: its parameters, what its manifest says, and its pods."""
