"""As `fake_service.py`; a request that the store's bucket refuses is sent again for a second."""

import os
import sys

from fake_service import AGENT

from kubetorch.datastore.tuning import Timing
from kubetorch.local import service

if __name__ == "__main__":
    sys.exit(service.main(os.environ, service.Agents(AGENT), Timing(store_retry_seconds=1.0)))
