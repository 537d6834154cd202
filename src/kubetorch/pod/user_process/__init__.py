"""The programs in the user's interpreter: the zygote and the workers that it forks.

Imports the standard library, and modules of this package that import nothing else themselves.
"""
