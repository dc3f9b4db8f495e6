"""Whether the sockets of a run can have their paths: the kernel takes no more than 107 bytes for one."""

from __future__ import annotations

import tempfile

from paceline.core.errors import ConfigError
from paceline.runtime.process_tree import TEMP_DIR_PREFIX

LONGEST_PATH = 107
# The longest path below the system's temporary directory is one of Ray's.
LONGEST_REST = f"/{TEMP_DIR_PREFIX}12345678/ray/session_2026-12-31_23-59-59_123456_1234567/sockets/plasma_store"


def check_socket_paths() -> None:
    """Refuse a run whose sockets could not be made.

    Raises:
        ConfigError: the path of the temporary directory is too long.
    """
    directory = tempfile.gettempdir()
    most = LONGEST_PATH - len(LONGEST_REST)
    if len(directory.encode()) > most:
        raise ConfigError(
            f"TMPDIR: {directory} is too long: paths of sockets below it would have more than {LONGEST_PATH} bytes; "
            f"choose a directory of at most {most} bytes, for example /tmp"
        )
