"""What runs in the user's interpreter: the zygote and the workers that it forks.

Imports only the standard library, and modules of this package that do so themselves:
`kubetorch.errors`, `kubetorch.lib.memory`, `kubetorch.lib.processors`,
`kubetorch.wire.codecs`, `kubetorch.wire.pickling`, `kubetorch.wire.failures`.
"""
