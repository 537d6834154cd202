"""What runs in the user's interpreter: the zygote and the workers that it forks.

Imports only the standard library, and modules of this package that do so themselves:
`kubetorch.errors`, `kubetorch.wire.codecs`, `kubetorch.wire.pickling`, `kubetorch.wire.failures`,
and of `kubetorch.lib` `memory`, `processes`, `processors` and `records`.
"""
