"""The one exception for mistakes a user can mend."""


class UserError(ValueError):
    """What the user asked for cannot work; the message names the value and the remedy.

    Commands print the message without a traceback and exit with status 2. Everything else that is
    raised is a defect of ours or of the machine and keeps its traceback.
    """
