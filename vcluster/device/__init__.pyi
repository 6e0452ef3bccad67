from .device import VirtualDevice as VirtualDevice
from .other_libraries import explain_call as explain_call
