"""The errors that qkattn raises on purpose; a message is the field, the value, what is valid."""


class ConfigError(ValueError):
    """A setting that cannot work."""


class UnknownFieldError(ConfigError):
    """A stored config has a field that this version does not know."""


class SpecError(ValueError):
    """An attention layer that cannot be built."""


class ConversionError(ValueError):
    """An attention layer or model that cannot be rewritten as asked."""


class MatchError(ConfigError):
    """No model of a variant costs what the baseline does."""


class RunDirectoryError(ConfigError):
    """A run directory cannot be used: it is in use, out of reach, or damaged."""


class DiskError(RunDirectoryError):
    """A file could not be written: the disk is full, over its quota, or fails."""


class ReadError(Exception):
    """The system failed to read a file, which may be sound; nothing was changed."""


class UnsuitableFileError(OSError):
    """A path where a file is read holds no regular file, or one that is too large."""

    def __str__(self) -> str:
        return str(self.strerror)


class InUseError(RunDirectoryError):
    """A live process holds the run directory."""


class ReportError(ConfigError):
    """A directory that is no study, or a file in it that cannot be read."""


class CheckpointError(RuntimeError):
    """Checkpoints that are damaged, or belong to other data."""


class Stopped(Exception):
    """Training stopped on request and saved what it trained; the same command resumes it."""


class Lost(Exception):
    """The run belongs to another process; nothing was saved since the last checkpoint."""


class ProcessError(RuntimeError):
    """Another process of the job failed, died or did not arrive."""
