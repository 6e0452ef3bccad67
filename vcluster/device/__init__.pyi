from .device import VirtualDevice as VirtualDevice
from .elsewhere import explain_keyword as explain_keyword
