"""WPipe's configurations: layouts of depth × width, parts of the model for them, and how fast they promise to be."""
