"""The data store from a program: files, folders and tensors, put and got by keys."""
