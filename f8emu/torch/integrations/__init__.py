"""Helpers for other libraries, beyond a converted model. Each module imports the library that it is named after.

Checkpoints that drop the metadata of a state dict lose the state of delayed scaling, which is stored there: Hugging
Face's need help. torchtitan needs converters, since it builds its models itself.
"""
