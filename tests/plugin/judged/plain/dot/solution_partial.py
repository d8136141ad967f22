def solution(x, y):
    return x[::2] @ y[::2]
