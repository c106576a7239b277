"""For verl's `external_lib`: importing this installs the RISE head in the process. See `rise_rl.integrations.verl`."""

from .verl import install

install()
