"""The viewer: a local page with a model's predictions, its maps and the records of its run.

guard      checks of every request (host, origin, size, time), and security headers of every response
uploads    uploaded images: checked, kept in memory, least recently used removed first
library    models and runs, which requests name by id
answers    predictions, rankings of patches, and predictions with patches removed, as JSON
runs       settings, scores and curves from run folders
app        the routes, and one thread for all model work; static/ is the page, which loads nothing from the network
"""
