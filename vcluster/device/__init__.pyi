from .device import VirtualDevice as VirtualDevice
