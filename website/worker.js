// A browser starts no Worker for a page that is read from a file.  There, run the script of the search in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => queueMicrotask(() => this.dispatchEvent(new MessageEvent("message", { data })))
      const script = this.inside.document.createElement("script")
      this.loaded = new Promise(done => script.addEventListener("load", done))
      script.src = url
      this.inside.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
