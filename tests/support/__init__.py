"""What the tests share: fault injection, stores, ranks, tensors."""
