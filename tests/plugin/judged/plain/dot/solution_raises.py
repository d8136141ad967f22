def solution(x, y):
    if len(x) == len(y):
        raise ValueError(f"no total for {len(x)} elements")
    return x @ y
