"""The exceptions of qkattn. A message names the field, its value and what is valid."""


class ConfigError(ValueError):
    """A setting is not valid."""


class UnknownFieldError(ConfigError):
    """A stored config has a field that this version does not know."""


class SpecError(ValueError):
    """An attention layer cannot be built from its settings."""


class ConversionError(ValueError):
    """An attention layer or model cannot be rewritten in the requested form."""


class MatchError(ConfigError):
    """No model of a variant has the same cost as the baseline."""


class RunDirectoryError(ConfigError):
    """A run directory cannot be used: it is in use, out of reach, or damaged."""


class DiskError(RunDirectoryError):
    """A file cannot be written: the disk is full, over its quota, or failing."""


class ReadError(Exception):
    """The system failed to read a file, which may be intact."""


class UnsuitableFileError(OSError):
    """A file to read is too large or not a regular file."""

    def __str__(self) -> str:
        return str(self.strerror)


class InUseError(RunDirectoryError):
    """A live process holds the run directory."""


class ReportError(ConfigError):
    """A directory is not a study, or a file of a study cannot be used."""


class CheckpointError(RuntimeError):
    """Checkpoints are damaged, or belong to other data."""


class Stopped(Exception):
    """Training stopped on request and has saved its state; the same command resumes it."""


class Lost(Exception):
    """Another process has taken over the run; nothing was saved since the last checkpoint."""


class ProcessError(RuntimeError):
    """Another process of the job has failed, died or not arrived."""
