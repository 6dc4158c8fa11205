"""Pure maths: tensors in, tensors out. No classes, no networks, no random state."""
