"""What goes wrong, in types. Every message says what was found, where in the user's source, and what to do."""

from __future__ import annotations


class AttnResError(Exception):
    """Base of every error that this library raises on purpose."""


class OptionError(AttnResError, ValueError):
    """An option has a wrong value, or two options exclude each other."""


class InputError(AttnResError, ValueError):
    """The example inputs do not fit the model, or there are none."""


class CaptureError(AttnResError):
    """No front end could trace the model; the message lists what each of them said."""


class RefusedError(AttnResError):
    """The model, or its use at run time, cannot be given depth attention; the model is left as it was."""


class VerificationError(RefusedError):
    """A transformed model failed one of its checks; the message names the check."""


class ExportError(AttnResError):
    """An export failed; no file was written."""


class MissingDependencyError(AttnResError, ImportError):
    """An optional dependency is missing; the message names the extra that installs it."""
