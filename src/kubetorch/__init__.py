"""Run Python on Kubernetes, or on a laptop without one: `import kubetorch as kt`.

Public names are resolved when they are first used, so that importing this package costs nothing:
it stands in every user module, and so in every worker.
"""

from kubetorch._version import __version__ as __version__
