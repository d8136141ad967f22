import torch


def matches(expected, tolerance):
    def check(data, output):
        want = expected(data)
        if output is None or output.shape != want.shape:
            return False, "the shape differs"
        good = torch.allclose(output.float(), want.float(), rtol=tolerance, atol=tolerance)
        return good, "" if good else "values differ"

    return check
