from .tracing import CALLS as CALLS, VIEWS as VIEWS, Traced as Traced
