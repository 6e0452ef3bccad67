from .localized import Class as Class, Localized as Localized
from .moves import step_of as step_of
