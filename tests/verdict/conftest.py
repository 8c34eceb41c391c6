from tests.report.conftest import *  # noqa: F403
