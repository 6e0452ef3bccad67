from .device import VirtualDevice as VirtualDevice
from .other_libraries import explain_keyword as explain_keyword
