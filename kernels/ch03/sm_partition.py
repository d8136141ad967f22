"""Two streams for a background job and for requests: by priority, or each on SMs of its own.

by_priority      Both streams may use all SMs; the hardware starts blocks of requests first.
by_smaller_grid  The same streams, but the background job launches blocks for eight SMs fewer.
by_partition     Each stream belongs to a green context: a context with some of the SMs of the GPU.
                 The streams share everything else, such as memory, loaded kernels and the L2 cache.
"""

from functools import cache
from typing import NamedTuple

import torch

REQUEST_SMS = 8
"""SMs for requests: the smallest partition of a Hopper GPU."""


class Streams(NamedTuple):
    background: torch.cuda.Stream
    foreground: torch.cuda.Stream
    background_sms: int  #: SMs that the background job may use.


@cache
def by_priority():
    default_priority, high_priority = 0, -1  # lower numbers are higher priorities
    sms = torch.cuda.get_device_properties().multi_processor_count
    background = torch.cuda.Stream(priority=default_priority)
    return Streams(background, torch.cuda.Stream(priority=high_priority), sms)


def by_smaller_grid():
    streams = by_priority()
    return streams._replace(background_sms=streams.background_sms - REQUEST_SMS)


@cache
def by_partition():
    from cuda.bindings import driver  # imported late: checks without a GPU do not need it

    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    sms = checked(driver.cuDeviceGetDevResource(device, kind))
    [few], _, rest = checked(driver.cuDevSmResourceSplitByCount(1, sms, 0, REQUEST_SMS))
    streams = []
    for partition in rest, few:
        description = checked(driver.cuDevResourceGenerateDesc([partition], 1))
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # a required flag
        context = checked(driver.cuGreenCtxCreate(description, device, default))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = checked(driver.cuGreenCtxStreamCreate(context, flags, 0))
        streams.append(torch.cuda.ExternalStream(int(stream)))
    return Streams(*streams, rest.sm.smCount)


def checked(result):
    """Return what a function of the driver returns beside its status, or raise the error."""
    status, *values = result
    if status:
        raise RuntimeError(f"the CUDA driver returns {status.name}")
    return values[0] if len(values) == 1 else values
