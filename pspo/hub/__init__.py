"""The Hugging Face hub, or what its cache holds if it cannot be reached."""

import functools
import logging
import os
import ssl
import urllib.error
import urllib.request

from huggingface_hub import constants

logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)  # it names kernels that nothing here needs

SECONDS = 3.0  # for an answer; the hub's libraries retry for a minute per file


def is_offline() -> bool:
    """Switch the hub's libraries to their cache alone if the hub cannot be reached, or somebody asked for it."""
    if not constants.HF_HUB_OFFLINE and not _answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
    return constants.HF_HUB_OFFLINE


@functools.cache
def _answers() -> bool:
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True  # any answer is one
    except OSError as error:
        return isinstance(getattr(error, "reason", None), ssl.SSLError)  # the libraries may have other certificates
    return True
