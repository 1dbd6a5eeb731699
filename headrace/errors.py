"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in what the user asked for: a run file, an input file, a budget.

    The message is one clear sentence with the value, the place and the fix. The command line prints it
    without a traceback and ends with exit code 2.
    """
