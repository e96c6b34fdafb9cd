"""Where numbers come from."""

import platform

from thoughtbubbles.provenance import device_name


def test_no_other_device_is_called_a_cpu():
    assert device_name("mps") == f"{platform.machine()} mps"
    assert " CPU, " in device_name("cpu")
