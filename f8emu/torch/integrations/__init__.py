"""What other libraries need beside a converted model. Each module imports the library that it is named after.

Checkpoints that drop the metadata of a state dict need something: the state of delayed scaling is there. torchtitan
needs converters, since it makes its models itself.
"""
