"""What a quantized tensor is, and what is done to tensors whole or in parts."""
