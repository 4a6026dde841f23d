"""`import penstock_client.sail as sail` in place of `import sophon.sail as sail`: see `penstock_client.compat.sail`."""

from penstock_client.compat.sail import *  # noqa: F403
