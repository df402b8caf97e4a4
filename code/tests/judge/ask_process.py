"""What test_process.py runs in a child: the code of the request, and a message before and after."""


def answer(request, channel):
    channel.stage("first")
    channel.send("value", {"name": "before"})
    exec(request["code"], {"channel": channel})
    channel.stage("second")
    channel.send("value", {"name": "after"})
