"""Functional reuse inside a pretrained model: capacity of the machine, plan, scan; the method's part 2."""
