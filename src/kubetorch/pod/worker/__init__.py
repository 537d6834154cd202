"""What runs in the user's interpreter. Imports only the standard library and modules of this
package that do so themselves (`kubetorch.errors`, `kubetorch.wire.codecs`, `kubetorch.wire.failures`).
"""
