"""What experiments need: a device, costs, recorded measurements."""

from .device import pick_device
from .records import load_data, load_record
from .shapes import ModelShape
from .timing import side_by_side

__all__ = ["ModelShape", "load_data", "load_record", "pick_device", "side_by_side"]
