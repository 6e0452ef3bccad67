from .command_line import (
    MOST_DEVICES as MOST_DEVICES,
    Parser as Parser,
    WrongWords as WrongWords,
    mesh_of as mesh_of,
)
from .traffic import hardware_of as hardware_of
