"""Files that appear whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Writes `content` (text as UTF-8) to `path` through a temporary file beside it; returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode('utf-8') if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
    try:
        with os.fdopen(handle, 'wb') as file:
            file.write(data)
        # mkstemp makes the file private; a report is as readable as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
