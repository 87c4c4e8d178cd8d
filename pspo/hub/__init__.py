"""Models: found embedded, in local folders or on the hub; adapters; and how both are saved."""

import logging

logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)  # it names kernels that nothing here needs
