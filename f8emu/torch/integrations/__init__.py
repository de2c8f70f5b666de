"""What other libraries need beside a converted model. Each module imports the library that it is named after.

Only checkpoints that drop the metadata of a state dict need something: the state of delayed scaling is there.
"""
